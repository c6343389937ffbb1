"""A model as data: which blocks, of what shape, in which layer; no weights, no torch.

Blocks are frozen and compare by value, so layers may share what is derived from them. A block names its weights below the `name`
of its layer: `parameters` all of them, in the order of their use, `linears` the matrices among them that a kernel prepares.
Parameters are named as Llama's checkpoints name them; a family whose checkpoints differ says so in its rules."""
