"""What the packages of several engines share: sessions that come and go, digests of weights, and blocks that are copied."""
