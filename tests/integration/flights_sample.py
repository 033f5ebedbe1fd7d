"""Four flights in the form of the demo's data: cancelled, diverted past midnight, early, and one in summer."""

from __future__ import annotations

CSV = b"""\
year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,flight,tailnum,origin,dest,\
air_time,distance,hour,minute,time_hour
2013,1,1,NA,630,NA,NA,815,NA,AA,1,NA,LGA,ORD,NA,733,6,30,2013-01-01T11:00:00Z
2013,1,1,20,2350,30,NA,445,NA,B6,2,N618JB,JFK,PSE,NA,1617,23,50,2013-01-02T04:00:00Z
2013,2,8,955,1000,-5,1150,1202,-12,UA,3,N14228,EWR,IAH,100,1400,10,0,2013-02-08T15:00:00Z
2013,7,1,1200,1200,0,1500,1455,5,UA,4,N14229,EWR,SFO,300,2565,12,0,2013-07-01T16:00:00Z
"""
