"""What names of columns and tables suggest. A name alone decides nothing: other modules weigh it with the values."""

from __future__ import annotations

import re

USER = {"user", "customer", "client", "visitor", "member", "account", "uid", "shopper", "person", "viewer", "listener"}
USER |= {"buyer", "subscriber", "reader", "player", "profile", "userid", "customerid", "guest"}
ITEM = {"item", "product", "article", "movie", "sku", "asin", "iid", "pid", "track", "song", "video", "listing", "book"}
ITEM |= {"ad", "content", "good", "game", "post", "document", "story", "recipe", "film", "news", "itemid", "productid"}
SESSION = {"session", "visit", "sid", "sessionid", "basket"}
REQUEST = {"request", "impression", "query", "search", "rid", "pageview", "slate"}
TIME = {"time", "timestamp", "ts", "date", "datetime", "at", "when", "day", "occurred", "dt"}
BOOKKEEPING = {"updated", "modified", "loaded", "ingested", "inserted", "processed", "synced", "exported", "expire"}
BEGINNING = {
    "since",
    "from",
    "created",
    "valid",
    "registered",
    "signed",
    "signup",
    "joined",
    "registration",
    "effective",
}
BEGINNING |= {"start", "launched", "added"}
IDENTITY = {"id", "key", "code", "uuid", "guid", "no", "nr", "number", "hash", "ref"}
ACTION = {"behavior", "behaviour", "action", "event", "type", "interaction", "activity", "kind", "verb"}
LABEL = {"label", "target", "click", "clicked", "purchased", "bought", "converted", "conversion", "outcome", "liked"}
LABEL |= {"engaged", "response", "success", "purchase", "like", "follow", "watched"}
RATING = {"rating", "rate", "star", "score", "grade", "stars"}
AMOUNT = {
    "price",
    "amount",
    "quantity",
    "qty",
    "cost",
    "revenue",
    "age",
    "count",
    "duration",
    "length",
    "weight",
    "size",
}
AMOUNT |= {"total", "discount", "value", "height", "width", "distance", "position", "rank", "year", "num", "balance"}
# Files of events, and of what happened later.
EVENTS = {
    "event",
    "log",
    "click",
    "view",
    "interaction",
    "transaction",
    "behavior",
    "behaviour",
    "rating",
    "impression",
}
EVENTS |= {"play", "action", "history", "activity", "stream", "clickstream", "pageview", "feed", "exposure"}
OUTCOMES = {"purchase", "order", "conversion", "outcome", "sale", "buy", "checkout", "payment", "booking"}

# Values of an action column, from weak to strong. What is stronger than looking at an item is a success.
WEAK_ACTIONS = {"pv", "view", "impression", "show", "shown", "exposure", "display", "see", "skip", "scroll", "remove"}
WEAK_ACTIONS |= {"remove_from_cart", "pageview", "page_view", "product_view", "view_item", "detail", "open", "hover"}
STRONG_ACTIONS = {"buy", "purchase", "purchased", "order", "transaction", "checkout", "convert", "conversion", "book"}
STRONG_ACTIONS |= {"cart", "addtocart", "add_to_cart", "add", "basket", "fav", "favorite", "favourite", "like", "save"}
STRONG_ACTIONS |= {"click", "wishlist", "share", "subscribe", "follow", "watch", "play", "install", "download", "sale"}


def words(name: str) -> set[str]:
    """The words of a name in the singular: "customerIDs" and "customer_id" both give customer and id."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    return {singular(word) for word in re.split(r"[^a-z]+", spaced.lower()) if word}


def singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4 and word not in ("movies", "series"):
        return word[:-3] + "y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word


def identifier(text: str) -> str:
    """A name for log.yaml: lower case, digits and underscores."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text)
    return re.sub(r"[^a-z0-9]+", "_", spaced.lower()).strip("_") or "table"
