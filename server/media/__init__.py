"""Media of requests: images, audio and video, fetched, decoded and processed off the event loop, within limits."""
