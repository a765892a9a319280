"""Requests, scheduling, the key/value cache, the forward pass and sampling."""
