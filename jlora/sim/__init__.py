"""Workloads as records, without a device: what a benchmark replays and a simulator will play."""
