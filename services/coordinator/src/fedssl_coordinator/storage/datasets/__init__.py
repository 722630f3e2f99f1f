"""Data sets that are registered once: public images that workers fetch, labelled ones that no worker sees."""
