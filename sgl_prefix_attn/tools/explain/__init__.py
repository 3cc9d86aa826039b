"""Explain a plan: its plain rows (plan/view.py) as text and as a picture."""
