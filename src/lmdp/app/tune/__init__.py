"""Settings on the frontier of canary leakage against accuracy, found on public data: it costs no privacy.

search       one value after the other, each at the best of those before it
run          `tune`: public data in two halves, cells, the choice, a recipe and a page
page         the frontier as a page
"""
