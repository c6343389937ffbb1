"""HTTP: middleware, keys, origins, streams and bodies. Knows no API: a route brings the shape of its errors along."""
