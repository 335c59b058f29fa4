"""What ``benchmarks/campaigns/unchanged.py`` takes digests of: a module per part, and how two records are compared."""
