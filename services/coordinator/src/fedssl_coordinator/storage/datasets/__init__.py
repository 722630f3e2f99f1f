"""Registered data sets: public images, which workers fetch, and labelled images, which no worker receives."""
