"""Work that is planned before it runs: items, shards, lines of results, and a cache of them.

A command makes a plan, which is a list of items with an estimated cost; nothing runs for that. What
comes of an item is one line of JSON, and a report is made of the lines alone. So the items can run
here, in shards that know nothing of each other, or on other machines; and an item of which nothing
has changed need not run again.
"""
