"""HTTP APIs, one folder each: routes, wire types, and the conversion between wire types and the types of `generate`."""
