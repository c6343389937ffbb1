"""Media of requests (images, audio and video): fetches, decodes and processes them off the event loop, within limits."""
