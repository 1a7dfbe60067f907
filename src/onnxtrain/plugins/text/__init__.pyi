from .chat_data import ChatData as ChatData
from .comparison_data import ComparisonData as ComparisonData
