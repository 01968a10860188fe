"""Precompiled GPU attention kernels: select, verify, load and launch a cubin in one call."""
