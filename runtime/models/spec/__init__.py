"""Model specs: blocks, their shapes and their layers as plain data; no weights, no torch.

Blocks are frozen and compare by value, so layers can share derived data. A block names its weights relative to the `name` of
its layer: `parameters` lists all of them in order of use, `linears` the matrices that a kernel prepares. Names are those of
Llama's checkpoints; a family with other names has rules that map them."""
