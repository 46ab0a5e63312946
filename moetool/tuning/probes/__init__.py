"""Timing one thing of a machine each: experts, a decoder layer, reads, copies to a GPU, predictions, a link."""
