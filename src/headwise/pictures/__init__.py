"""Weights as pictures: small maps in HTML, which notebooks show by themselves, and figures of matplotlib."""
