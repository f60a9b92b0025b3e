"""What a sweep showed, as a page."""
