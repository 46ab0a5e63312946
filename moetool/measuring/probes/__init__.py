"""Probes of a machine, one per file: experts, a decoder layer, reads, copies to a GPU, predictions, a link."""
