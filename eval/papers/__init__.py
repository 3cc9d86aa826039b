"""The papers' experiments at our scale: see __main__.py."""
