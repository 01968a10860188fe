"""Replaying calls that were recorded from NVIDIA's host code: see scripts/check_golden.py."""
