"""What a route is, what its handler is given, and the document of all routes."""
