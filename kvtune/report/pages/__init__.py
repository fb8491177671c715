"""The HTML pages: their sections, and the frame around them."""
