"""The KV cache: pages, prefixes, and caches of single requests.

pages                        rows of every layer, and the batch that a forward reads and writes
ledger                       which request has which page, which are reused and evicted, growth
paged_attention              attention over pages
latents                      multi-head latent attention over latents
indexed                      choices of tokens for indexed attention
kept_caches                  prefixes of families with caches of their own
"""
