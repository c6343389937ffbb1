"""What goes with a request wherever it is worked on: who asks and since when, its id in the log, its turn off the event loop."""
