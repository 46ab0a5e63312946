"""The loop: requests, batches, forwards and sampling."""
