"""Explain a plan: from its record to plain rows, to text and to a picture."""
