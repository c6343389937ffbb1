"""HTTP layer: middleware, keys, origins, streams and bodies. Independent of APIs: each route declares its error format."""
