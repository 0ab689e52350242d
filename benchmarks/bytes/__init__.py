"""What `bench_bytes.py` measures: states, who saves and restores them, how that is timed, and what it must come to."""
