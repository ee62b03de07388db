"""Where KV lives: the store on disk and the cache of exact prefixes."""
