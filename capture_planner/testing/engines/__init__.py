"""Seeded generators of engine configurations, for goldens and for runs beside the engines themselves."""
