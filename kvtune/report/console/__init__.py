"""Results on a terminal, with rich: the page's sections in their terse form."""
