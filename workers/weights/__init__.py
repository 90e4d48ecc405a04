"""Weights: how a model comes into the origin."""
