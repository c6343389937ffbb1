"""One route per file: read the request, ask the engine, shape the answer."""
