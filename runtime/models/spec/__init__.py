"""Model specs: a model's blocks and their shapes as plain data. They contain no weights and do not import torch.

Blocks are frozen and compared by value, so equal layers share derived data. A block names its weights relative to the `name` of
its layer. `parameters` yields all of them in order of use, `linears` only the matrices of linear layers. Names are those of
Llama's checkpoints; a family with other names has rules that map them."""
