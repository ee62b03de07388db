"""The gateway: an OpenAI-compatible server over one engine, with compiled chunks that requests name or contain.

::

    settings   flags, environment, file        keys       who asks, and in which namespace
    app        puts everything together        limits     sizes, rates, time, how many at once
    routes/    one module a group of paths      errors     what went wrong, in OpenAI's shape
    messages   requests as plain messages       answers    streams of tokens as OpenAI's objects
    tenants    what a namespace has: chunks, documents, texts that are found in prompts
"""
