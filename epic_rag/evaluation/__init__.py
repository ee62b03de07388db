"""The quality instrument: how close does a linked prompt come to full computation, and at what cost?

Same documents, same question, same token ids in every arm; only the compile context and the link policy differ, so a
difference is the linking's. Reading order of the modules: ``example`` → ``datasets`` (``readers``, ``generated``) →
``runner`` (``metrics``, ``records``) → ``summary`` (``intervals``) → ``report`` (``plots``), and ``command``.
"""
