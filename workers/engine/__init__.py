"""Engines: they turn token ids into token ids, in a process of their own, and know no queue and no store."""
