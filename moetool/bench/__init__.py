"""Paired measurements behind `moetool bench`; `bench_result` is the kernel that all of them share."""
