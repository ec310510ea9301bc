"""Chooses the number of drafts per request, from acceptance rates and times of rounds."""

POLICIES = ("static:K", "table", "profile", "adaptive")  # the names of policies, see `make_policy`
