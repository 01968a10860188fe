"""Parts of scripts/bench_attention.py: workloads, peers, timing, results."""
