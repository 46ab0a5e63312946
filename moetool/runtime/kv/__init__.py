"""The KV cache: pages, prefixes, and caches of single requests.

transformers' paged cache gives sequences their pages, behind `moetool.runtime.loop.batching`.

prefix_pages                 which pages are reused and evicted
growing_pages                a paged cache that begins small
paged_attention              attention over pages
kept_caches                  prefixes of families with caches of their own
"""
