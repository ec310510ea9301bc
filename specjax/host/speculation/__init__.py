"""Chooses the number of drafts per request, from learned acceptance rates and times of rounds."""

POLICIES = ("static:K", "table", "profile", "adaptive")  # names of the ways to choose it
