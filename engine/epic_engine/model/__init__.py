"""From a name to a decoder that runs chosen rows: loading, observation, rotary tables, the correctness gate."""
