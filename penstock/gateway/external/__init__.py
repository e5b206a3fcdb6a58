"""Requests that external servers answer: as text to them, as an answer like any other from them."""
