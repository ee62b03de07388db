"""Where KV lives while it is used: pages, resident chunks, and the cache of exact prefixes."""
