from enum import Enum

class CacheHitSource(Enum):
    HOST = "host"
    DISK = "disk"
