"""Seeded loads for a server: who shares which prompt tokens with whom, and when requests come.

load -> grouped, trees, traced -> catalogue
"""
