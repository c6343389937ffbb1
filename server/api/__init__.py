"""Every API: a folder holds its routes, wire types, and the conversion to and from `generate`."""
