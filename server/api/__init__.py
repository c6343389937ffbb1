"""HTTP APIs, one folder each: routes, wire types, and the conversion to and from `generate`."""
