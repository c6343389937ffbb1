"""What several paths answer by: from what a body became to a response, over HTTP."""
