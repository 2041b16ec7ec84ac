"""Schemes: what users write, how it is read, and what it means.

=============  ======================================================
module         what is in it
=============  ======================================================
``scheme``     ``Scheme``: codecs of keys and values, and how many tokens stay exact
``grammar``    how a scheme is written
``names``      what a name stands for
``catalogue``  the names that users write, with a line of advice each
``help``       a page of Markdown for each method and modifier
=============  ======================================================
"""
