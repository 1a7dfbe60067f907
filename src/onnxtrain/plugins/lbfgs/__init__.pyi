from .search import Point as Point
from .search import minimize as minimize
